"""One session per notebook: wires cluster, runs and views together."""
