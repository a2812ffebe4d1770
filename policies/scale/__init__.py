"""How many workers a mesh needs, by what is asked of it.

fleet_demand.py    what all schedulers together are asked for
"""
