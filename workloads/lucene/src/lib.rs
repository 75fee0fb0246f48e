//! The native methods of `java/Marks.java`, the Java class `elfen.Marks`. A Java service publishes
//! its queue and its requests through `elfen_rt::service`, as other services do.
//!
//! The methods take only numbers. Even the service's name is passed as numbers, so no function of
//! the JVM is needed to read the arguments. A serving thread claims a slot and keeps it until the
//! thread ends. Java calls these methods from any thread. A panic must not unwind into Java, so no
//! code here panics.

#![cfg(target_os = "linux")]

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::OnceLock;

use elfen_rt::service::{Service, Worker};

static SERVICE: OnceLock<Service> = OnceLock::new();

thread_local! {
    static WORKER: RefCell<Option<Worker<'static>>> = const { RefCell::new(None) };
}

/// An argument that the JVM passes before the method's own arguments, and that is not used here.
type Unused = *mut c_void;

const DONE: i32 = 0;
const REFUSED: i32 = -1;

/// Opens the page of a service. The four numbers hold the bytes of its name, which end at the first
/// zero.
#[unsafe(no_mangle)]
extern "system" fn Java_elfen_Marks_open(
    _jvm: Unused,
    _class: Unused,
    a: i64,
    b: i64,
    c: i64,
    d: i64,
    lanes: i32,
) -> i32 {
    let words = [a, b, c, d].map(i64::to_le_bytes);
    let bytes = words.as_flattened();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (Ok(name), Ok(lanes)) = (std::str::from_utf8(&bytes[..end]), u32::try_from(lanes)) else {
        return REFUSED;
    };
    let Ok(service) = Service::open(name, lanes) else { return REFUSED };
    if SERVICE.set(service).is_ok() { DONE } else { REFUSED }
}

/// The calling thread serves this lane from now on.
#[unsafe(no_mangle)]
extern "system" fn Java_elfen_Marks_claim(
    _jvm: Unused,
    _class: Unused,
    lane: i32,
    cpu: i32,
) -> i32 {
    let claimed = SERVICE.get().and_then(|service| {
        let (lane, cpu) = (u32::try_from(lane).ok()?, u32::try_from(cpu).ok()?);
        service.claim(lane, cpu).ok()
    });
    let Some(worker) = claimed else { return REFUSED };
    WORKER.set(Some(worker));
    DONE
}

/// Publishes how many requests wait for a lane.
#[unsafe(no_mangle)]
extern "system" fn Java_elfen_Marks_waiting(_jvm: Unused, _class: Unused, lane: i32, count: i32) {
    let (Ok(lane), Ok(count)) = (u32::try_from(lane), u64::try_from(count)) else { return };
    if let Some(service) = SERVICE.get() {
        service.set_queue_len(lane, count);
    }
}

/// `arrived_ns` is the System.nanoTime() of the request's arrival, which is CLOCK_MONOTONIC.
#[unsafe(no_mangle)]
extern "system" fn Java_elfen_Marks_begin(
    _jvm: Unused,
    _class: Unused,
    request: i64,
    arrived_ns: i64,
    class: i64,
) {
    with_worker(|worker| {
        worker.begin_arrived(request.cast_unsigned(), arrived_ns.cast_unsigned());
        worker.class(class.cast_unsigned());
    });
}

#[unsafe(no_mangle)]
extern "system" fn Java_elfen_Marks_stage(_jvm: Unused, _class: Unused, stage: i32) {
    if let Ok(stage) = u16::try_from(stage) {
        with_worker(|worker| worker.stage(stage));
    }
}

#[unsafe(no_mangle)]
extern "system" fn Java_elfen_Marks_end(_jvm: Unused, _class: Unused) {
    with_worker(Worker::end);
}

fn with_worker(each: impl FnOnce(&mut Worker<'static>)) {
    WORKER.with_borrow_mut(|worker| {
        if let Some(worker) = worker {
            each(worker);
        }
    });
}
