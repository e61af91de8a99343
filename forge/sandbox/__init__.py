"""Where commands of agents run: no network, no files but a workspace of their own, and an end to everything."""
