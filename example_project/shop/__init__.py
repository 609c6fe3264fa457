"""The shop: what a project that uses ``outbox_app`` looks like.

``services`` write rows and stage jobs in one transaction, ``tasks`` do the work after the commit.
"""
