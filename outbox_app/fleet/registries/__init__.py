"""The registries, by the names that ``OUTBOX["FLEET"]["REGISTRY"]`` accepts."""

from ...exports import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {".database": ["DatabaseRegistry"], ".static": ["StaticRegistry"], ".tooz": ["ToozRegistry"]},
)
