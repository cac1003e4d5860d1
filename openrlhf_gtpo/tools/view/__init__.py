"""The token viewer: turns rollout dumps into one HTML file that shows the path from entropy to share to advantage."""
