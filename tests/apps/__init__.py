"""Each capability with the apps that it needs, and none besides, in a process of its own."""
