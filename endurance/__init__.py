"""Long tests: an hour of churn (`soak`) and hostile clients (`attack`). Not installed."""
