//! Goal: the recorded events are what happened, in order, and a reader learns what it misses.
//! Method: a server and a client on loopback, storms of switches, and small rings.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_kernel::events::{Detail, Events, Watched};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::event::{Event, EventKind, Words};

#[track_caller]
fn attach(detail: Detail, events: u32, port: u16) -> Events {
    let cpus = (0..64).collect();
    let watched = Watched { port, processes: vec![std::process::id()], cpus };
    Events::attach(detail, events, &watched)
        .unwrap_or_else(|error| panic!("needs root and eBPF of Linux 6.3: {error}"))
}

fn read(events: &mut Events) -> (Vec<Event>, u64) {
    let (mut words, mut lost): (Vec<Words>, u64) = (Vec::new(), 0);
    for cpu in 0..events.cpus() {
        let gap = events.read(cpu, &mut words);
        lost += gap.map_or(0, |gap| gap.count);
        assert!(gap.is_none_or(|gap| gap.from_ns <= gap.to_ns && gap.to_ns <= monotonic_ns()));
    }
    words.sort_by_key(|words| words[0]);
    (words.iter().map(|words| Event::decode(words).expect("a known kind")).collect(), lost)
}

#[test]
#[ignore = "needs root and eBPF of Linux 6.3"]
fn a_request_leaves_its_events() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut events = attach(Detail::Full, 65_536, address.port());
    let began_ns = monotonic_ns();
    let server = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        let mut bytes = [0; 64];
        while connection.read(&mut bytes).unwrap() > 0 {
            connection.write_all(b"answer").unwrap();
        }
    });
    let mut client = TcpStream::connect(address).unwrap();
    let from = client.local_addr().unwrap();
    for _ in 0..3 {
        client.write_all(b"ask").unwrap();
        let mut answer = [0; 6];
        client.read_exact(&mut answer).unwrap();
    }
    drop(client);
    server.join().unwrap();
    let (found, lost) = read(&mut events);
    assert_eq!(lost, 0);
    assert!(found.iter().all(|e| (began_ns - 1_000_000_000..monotonic_ns()).contains(&e.at_ns)));
    let connection = u64::from(u32::from_le_bytes([127, 0, 0, 1])) << 32 | u64::from(from.port());
    let steps: Vec<&str> = found
        .iter()
        .filter_map(|event| match event.kind {
            EventKind::Ready { connection: c, bytes: 3 } if c == connection => Some("ready"),
            EventKind::Received { connection: c, bytes: 3, peek: false } if c == connection => {
                Some("received")
            }
            EventKind::Transmitted { connection: c, .. } if c == connection => Some("transmitted"),
            EventKind::Sent { connection: c, .. } if c == connection => Some("sent"),
            _ => None,
        })
        .collect();
    // The client may send its next request before the call that wrote the answer has returned.
    let without = |left_out| steps.iter().copied().filter(|&s| s != left_out).collect::<Vec<_>>();
    assert_eq!(without("sent"), ["ready", "received", "transmitted"].repeat(3), "{found:?}");
    assert_eq!(without("ready"), ["received", "transmitted", "sent"].repeat(3), "{found:?}");
    let own = std::process::id();
    let woken = |e: &Event| matches!(e.kind, EventKind::Waking { process, .. } if process == own);
    assert!(found.iter().any(woken), "the server sleeps until a request wakes it");
    let receives = u16::try_from(libc::SYS_recvfrom).ok();
    let slept = |e: &Event| matches!(e.kind, EventKind::Switch(s) if s.call == receives);
    assert!(found.iter().any(slept), "the switch names the system call");
    assert!(events.missed().is_none_or(|missed| missed.from_ns < missed.to_ns));
}

/// Goal: in a storm of switches that no reader can follow, each event is read or counted as lost,
/// and lost events lie between the events that were read before and after. Method: threads pass a
/// byte to each other on every CPU, rings have 64 KiB, and a reader reads every 20 ms.
#[test]
#[ignore = "needs root and eBPF of Linux 6.3"]
fn a_storm_is_read_or_counted() {
    const RING: u32 = 64 * 1024 / 32;
    let mut events = attach(Detail::Sched, RING, 0);
    let (ends, mut threads) = (Arc::new(AtomicBool::new(false)), Vec::new());
    for cpu in core_affinity::get_core_ids().unwrap() {
        let (mut from, mut to) = (io::pipe().unwrap(), io::pipe().unwrap());
        let until = Arc::clone(&ends);
        threads.push(std::thread::spawn(move || {
            assert!(core_affinity::set_for_current(cpu));
            while !until.load(Relaxed) {
                to.1.write_all(&[1]).unwrap();
                from.0.read_exact(&mut [0]).unwrap();
            }
        }));
        threads.push(std::thread::spawn(move || {
            assert!(core_affinity::set_for_current(cpu));
            // The other thread ends first, which closes its pipe.
            while to.0.read_exact(&mut [0]).and_then(|()| from.1.write_all(&[1])).is_ok() {}
        }));
    }
    let cpus = events.cpus();
    let mut last_ns = vec![monotonic_ns(); cpus as usize];
    let (mut sums, began) = ((0, 0), Instant::now());
    let mut look = |events: &mut Events, sums: &mut (u64, u64)| {
        for cpu in 0..cpus {
            let (mut words, last_ns): (Vec<Words>, _) = (Vec::new(), &mut last_ns[cpu as usize]);
            if let Some(lost) = events.read(cpu, &mut words) {
                sums.1 += lost.count;
                // A nested writer has the earlier index and the later time.
                assert!(lost.from_ns <= lost.to_ns && lost.from_ns <= *last_ns, "{lost:?}");
                assert!(words.iter().all(|words| lost.to_ns <= words[0]), "{lost:?}");
            }
            sums.0 += words.len() as u64;
            *last_ns = words.last().map_or(*last_ns, |words| words[0].max(*last_ns));
        }
    };
    // With a CPU to itself, the storm takes two seconds for this many events.
    let patience = Instant::now() + Duration::from_secs(60);
    while sums.0 + sums.1 < 1_000_000 && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(20));
        look(&mut events, &mut sums);
    }
    let a_second = (sums.0 + sums.1) as f64 / began.elapsed().as_secs_f64();
    writeln!(io::stderr(), "a storm of {a_second:.0} events a second: {sums:?} read and lost")
        .unwrap();
    ends.store(true, Relaxed);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    events.watch(&Watched::default()).unwrap();
    let written = |events: &Events| (0..cpus).map(|cpu| events.written(cpu)).sum::<u64>();
    while sums.0 + sums.1 != written(&events) {
        assert!(Instant::now() < patience, "{sums:?} of {}", written(&events));
        look(&mut events, &mut sums);
    }
    assert!(sums.0 >= u64::from(RING) && sums.1 > sums.0 / 100, "{sums:?}: no storm");
}

/// Goal: every event is read or counted as lost. Method: a ring of 16 events, while this thread
/// switches all the time.
#[test]
#[ignore = "needs root and eBPF of Linux 6.3"]
fn overwritten_events_are_counted() {
    let mut events = attach(Detail::Sched, 16, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    let (mut seen, mut lost) = (0, 0);
    while (seen < 100 || lost < 1_000) && Instant::now() < deadline {
        for _ in 0..100 {
            std::thread::sleep(Duration::from_micros(1));
        }
        let (found, missed) = read(&mut events);
        seen += found.len() as u64;
        lost += missed;
    }
    assert!(seen >= 100 && lost >= 1_000, "{seen} read, {lost} lost in a minute");
    // No process is watched any more, so no more events are written.
    events.watch(&Watched::default()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let written: u64 = (0..events.cpus()).map(|cpu| events.written(cpu)).sum();
        let (found, missed) = read(&mut events);
        seen += found.len() as u64;
        lost += missed;
        // A switch that was in progress at that moment, and threads that end, may still be
        // recorded. Then the sums are compared again.
        if seen + lost == written {
            return;
        }
        assert!(Instant::now() < deadline, "{seen} read and {lost} lost of {written}");
    }
}
