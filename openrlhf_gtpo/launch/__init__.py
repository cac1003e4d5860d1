"""Ray clusters over several hosts: start a node and clear up after it, wait until all have joined."""
