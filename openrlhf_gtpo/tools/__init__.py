"""What stands beside training: nothing that trains imports it."""
