"""The admin in a real browser, over the example project with everything running.

As an app of that project (see ``settings``) this package brings subscriptions in trouble.
"""
