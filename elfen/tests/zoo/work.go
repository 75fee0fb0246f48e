package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"strconv"
	"sync"
)

func main() {
	times := 1
	if len(os.Args) > 1 {
		times, _ = strconv.Atoi(os.Args[1])
	}
	var sums [8][32]byte
	var all sync.WaitGroup
	for worker := range sums {
		all.Add(1)
		go func(worker int) {
			defer all.Done()
			sums[worker][0] = byte(worker)
			for i := 0; i < 60000*times; i++ {
				sums[worker] = sha256.Sum256(sums[worker][:])
			}
		}(worker)
	}
	all.Wait()
	fmt.Printf("%x\n", sums)
}
