"""Games of one file each."""
