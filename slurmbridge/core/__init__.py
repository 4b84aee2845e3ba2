"""The pure core of the bridge: events in, actions out.

`machine.Machine.handle(event)` is the only mutator. The app turns actions into I/O, and every
action that can fail ends in another event, so that no error path goes around the machine.
"""
