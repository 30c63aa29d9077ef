"""The status page: what `coordinator status` and `rounds` tell, for a browser. It only looks.

entrance.py      whose request is answered, by address, certificate or token
view.py          the service's answers as what a page says, times and numbers in words
charts.py        figures as points in an SVG's coordinates
page.py          gathers, renders, routes
"""
