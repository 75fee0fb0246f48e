# A nap with preemption on: the thread stays on its CPU, but other threads can run there.
s|^\tpreempt_disable();$|\tmigrate_disable();|
s|^\tpreempt_enable();$|\tmigrate_enable();|
