"""A worker's decisions outside its engine: adapters on their way, requests in their phases, the view that schedulers get."""
