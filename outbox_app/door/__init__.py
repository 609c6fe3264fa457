"""The door: signed messages over HTTP, to and from registered peers. Needs the extra ``door``."""
