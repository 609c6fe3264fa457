"""The shop: an example of a project that uses ``outbox_app``.

``services`` writes rows and stages jobs in one transaction, ``tasks`` does the work after it.
"""
