"""The competitors' programs: what runs on each rank. None of them knows of the others."""
