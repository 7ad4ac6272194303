"""What only tests use: processes that run the training job, and break it."""
