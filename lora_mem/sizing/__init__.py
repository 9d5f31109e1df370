"""Every byte of an adapter before anything is run. The standard library only."""
