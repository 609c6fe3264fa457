"""``python -m example_project.fleet_demo``: callers go on while servers are killed and stopped.

Four servers sell tickets; each is a process with an address of its own, and registers. Callers find
them there, and balance their calls three ways. Then one server is killed, and one is stopped, while
callers that fail over go on beside callers that do not. Everybody wants a seat at one show: the
servers pass these commands on to the one that leads it. Then that one is killed.

Each answer says which server has given it, and the demo draws a picture of that. At the end the
tickets that were sold are compared with the answers. Exit code 0 only if no caller that fails over
saw an error, and no seat was sold twice or was lost.
"""
