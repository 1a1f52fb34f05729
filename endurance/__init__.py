"""What podgpu must outlast: random input (`fuzz`), an hour of churn (`soak`), attackers (`attack`). Not installed."""
