"""Rollouts: groups of sampled responses, their rewards and their advantages."""
