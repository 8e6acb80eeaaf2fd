"""Several models on shared devices, simulated: the schedulers under the Landlord, and what others do instead."""
