"""Agent programs of others, run unchanged as rollout workers: recipes, launcher, installer."""
