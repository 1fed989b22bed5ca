"""Discovery: the rules of an op that nobody wrote any for, found by running it on shards of small tensors."""
