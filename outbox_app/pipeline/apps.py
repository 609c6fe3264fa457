"""The Django app of the pipeline."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .. import capability


class PipelineConfig(capability.Capability):
    name = "outbox_app.pipeline"
    label = "outbox_pipeline"
    verbose_name = _("Outbox: pipeline")
    needs = ("outbox_app.events",)

    def start(self) -> None:
        from ..events.archives import provide_archives

        provide_archives("outbox_app.pipeline.driver.archive_lookup.ArchiveLookup")
