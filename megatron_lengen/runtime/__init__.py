"""Where this process runs: its device, its process groups, its seeds."""
