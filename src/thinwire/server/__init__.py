"""Parameter servers: processes that form the mean of what workers push, and the workers' way to them."""
