"""Tables, pictures and the HTML report made from a run's records; no plotting library needed."""
