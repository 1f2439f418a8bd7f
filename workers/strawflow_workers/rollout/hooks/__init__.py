"""Functions of users in the rollout path, named by dotted path `package.module:function`. Which file holds what:

interfaces.py  what a hook is given and gives back: the signatures, and nothing else; the module that users import
interfaces_algorithm.py  the same for hooks that replace a part of the algorithm
load.py        from a dotted path to a function whose parameters fit, or a ConfigError
load_algorithm.py  those of the algorithm, their answers checked
generated.py   calls the generate hook and makes stored members of what it returns
whole.py       calls the hook that makes all rollouts of a claim
turns.py       sessions: rollouts of several turns that go on at the turn where they were broken off
filtered.py    calls the filters
converted.py   calls post-processing and conversion, which shape what a group is trained as
logged.py      calls the log hook
mixed.py       calls the curriculum and data sources
slime.py       takes functions that were written for slime's interfaces; slime_training.py: those between
               rollouts and training; slime_rollout.py: its rollout function; slime_source.py: data source classes
check.py       `strawflow hook check`: the contract test that users run on their own function, in the world of made_up.py;
               check_prompts.py: that of curricula and data sources; check_algorithm.py: that of hooks of the algorithm
"""
