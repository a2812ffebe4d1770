"""How many workers a mesh needs, by what is asked of it.

fleet_demand.py     what all schedulers together are asked for
rate_forecast.py    what they will be asked for when a worker that starts now is of use
starts.py           how long that takes
need.py             the workers that a load needs, by the planner's law and packing
sizing.py           how many there should be
base_sizer.py        all of it, for one base model
"""
