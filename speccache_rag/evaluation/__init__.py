"""How close policies come to full recompute, on a data file of questions with their retrieved chunks."""
