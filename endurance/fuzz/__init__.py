"""Every parser of podgpu against a million made-up inputs each: `python -m endurance.fuzz`, `make fuzz`."""
