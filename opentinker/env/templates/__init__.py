"""What `opentinker env new` writes: each module is a starting point, and works as it stands."""
