# A nap that stays on its CPU and does not keep it.
s|^\tpreempt_disable();$|\tmigrate_disable();|
s|^\tpreempt_enable();$|\tmigrate_enable();|
