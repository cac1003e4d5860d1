"""The token viewer: rollout dumps in, one HTML file out, which shows the way from entropy to share to advantage."""
