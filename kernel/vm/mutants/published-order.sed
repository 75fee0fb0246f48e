# The order of the thesis's Figure 5.6: arm and wait, and check only after waking.
s|^\twhy = nanonap_why_wake(napper, request);$|\twhy = 0;|
s|^\treturn 0; /\* look again \*/$|\treturn nanonap_why_wake(napper, request);|
