"""Ray clusters over several hosts: start a node and clean up after it, and wait until all nodes have joined."""
