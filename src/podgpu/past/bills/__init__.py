"""Bills and costs: sums of charges. Reads nothing."""
