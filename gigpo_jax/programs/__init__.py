"""What the learner and the sampler run on the devices."""
