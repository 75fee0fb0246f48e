# The order of the thesis's Figure 5.6: arm and wait; look only after waking.
s|^\twhy = why_wake(napper, request);$|\twhy = 0;|
s|^\treturn 0; /\* look again \*/$|\treturn why_wake(napper, request);|
