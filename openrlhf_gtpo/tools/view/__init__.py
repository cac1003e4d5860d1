"""The token viewer: rollout dumps in, one HTML file out, which shows the path from entropy to share to advantage."""
