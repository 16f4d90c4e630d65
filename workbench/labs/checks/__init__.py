"""The checks of the labs' exercises: one file for each lab."""
