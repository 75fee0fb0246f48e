//! Goal: no invalid page crashes a reader, and each error says what was found and what was
//! expected. Method: headers with one wrong field, pages truncated to many lengths, and pages of
//! random bytes, all in real segments.

use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::memory::{Access, Memory, MemoryError};
use elfen_rt::service::Service;
use elfen_rt::signal::control::ControlSlot;
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::{NAME_BYTES, Page, PageError, SLOTS_MAX};
use elfen_rt::signal::service::{OpenError, ServiceReader, ServiceSlot, key_of, page_name};
use elfen_rt::signal::task::TaskSlot;
use proptest::prelude::*;

fn memory_of(bytes: &[u8]) -> Memory {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes.len(), 0o600).unwrap();
    memory.remove_name().unwrap();
    // SAFETY: this test made the segment, writable and as long as `bytes`, and no other process has
    // its id.
    unsafe { memory.base().as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    memory
}

/// The bytes of a valid page of two lanes.
fn valid_page() -> Vec<u8> {
    let bytes = vec![0; Page::<LaneSlot>::bytes(2)];
    let page = Page::<LaneSlot>::format(memory_of(&bytes), 2, 0, &[0; NAME_BYTES]).unwrap();
    // SAFETY: the slice is the page's memory, which nothing writes meanwhile.
    let written =
        unsafe { std::slice::from_raw_parts(page.memory().base().as_ptr(), page.memory().len()) };
    written.to_vec()
}

fn error_of(change: impl Fn(&mut Vec<u8>)) -> PageError {
    let mut bytes = valid_page();
    change(&mut bytes);
    Page::<LaneSlot>::open(memory_of(&bytes)).unwrap_err()
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
}

#[test]
fn a_valid_page_opens() {
    assert_eq!(Page::<LaneSlot>::open(memory_of(&valid_page())).unwrap().slot_count(), 2);
}

#[test]
fn each_wrong_header_is_named_with_both_values() {
    let says = |change: &dyn Fn(&mut Vec<u8>)| error_of(change).to_string();
    assert_eq!(
        says(&|page| page.fill(0)),
        "the lane page has no magic number yet: its maker has not finished"
    );
    assert_eq!(
        says(&|page| page[..8].copy_from_slice(b"ELFNTASK")),
        "the lane page has magic 0x4b5341544e464c45, expected 0x454e414c4e464c45"
    );
    assert_eq!(says(&|page| put(page, 8, 77)), "the lane page has version 77, this build reads 7");
    assert_eq!(says(&|page| put(page, 12, 0)), "the lane page has 0 slots, expected 1 to 8192");
    assert_eq!(
        says(&|page| put(page, 12, SLOTS_MAX + 1)),
        "the lane page has 8193 slots, expected 1 to 8192"
    );
    assert_eq!(says(&|page| put(page, 16, 9)), "the lane page says it has 9 bytes, expected 20096");
    assert_eq!(
        says(&|page| put(page, 24, 64)),
        "the lane page has slots of 64 bytes, expected 9984"
    );
    assert_eq!(
        says(&|page| page.truncate(20095)),
        "the lane page says it has 20095 bytes, expected 20096"
    );
    assert_eq!(
        says(&|page| page.truncate(127)),
        "the lane page has 127 bytes, but a header has 128"
    );
}

#[test]
fn more_slots_than_bytes_are_refused_before_any_is_touched() {
    let error = error_of(|page| {
        put(page, 12, 3);
        put(page, 16, u32::try_from(Page::<LaneSlot>::bytes(3)).unwrap());
    });
    assert_eq!(error, PageError::Size { channel: "lane", found: 20096, expected: 30080 });
}

#[test]
fn a_header_rewritten_after_its_check_changes_nothing() {
    let page = Page::<LaneSlot>::open(memory_of(&valid_page())).unwrap();
    page.header().slot_count.store(u32::MAX, Relaxed);
    page.header().slot_size.store(u32::MAX, Relaxed);
    assert_eq!(page.slots().count(), 2);
    assert!(page.slot(2).is_none() && page.slot(u32::MAX).is_none());
}

#[test]
fn an_unmapped_page_of_another_version_is_replaced() {
    let name = format!("old-{}", std::process::id());
    let old = Service::open(&name, 1).unwrap();
    old.page().header().version.store(99, Relaxed);
    let refused = Service::open(&name, 1).unwrap_err();
    assert_eq!(refused.to_string(), "the service page has version 99, this build reads 7");
    let refused = ServiceReader::open(&name).unwrap_err();
    assert_eq!(refused.to_string(), "the service page has version 99, this build reads 7");
    drop(old);
    let new = Service::open(&name, 1).unwrap();
    ServiceReader::open(&name).unwrap();
    new.remove().unwrap();
}

#[test]
fn a_page_that_its_maker_never_finished_is_replaced() {
    let name = format!("half-{}", std::process::id());
    let key = key_of(&page_name(&name).unwrap());
    drop(Memory::create_segment(key, 4096, 0o600).unwrap()); // its maker dies without a header
    assert!(matches!(
        ServiceReader::open(&name),
        Err(OpenError::Page(PageError::Unfinished { .. }))
    ));
    Service::open(&name, 3).unwrap().remove().unwrap();
}

#[test]
fn invalid_names_and_lane_counts_are_refused() {
    let name = format!("count-{}", std::process::id());
    for lanes in [0, SLOTS_MAX + 1, u32::MAX] {
        let error = Service::open(&name, lanes).unwrap_err().to_string();
        assert_eq!(error, format!("the service page has {lanes} slots, expected 1 to 8192"));
    }
    assert!(matches!(Service::open("", 1), Err(OpenError::Name)));
    let one = Service::open(&name, 1).unwrap();
    let error = Service::open(&name, 2).unwrap_err();
    assert_eq!(error, OpenError::Slots { found: 1, asked: 2 });
    one.remove().unwrap();
}

/// Makes every possible reading of every slot.
fn read_everything(bytes: &[u8]) {
    if let Ok(page) = Page::<LaneSlot>::open(memory_of(bytes)) {
        for slot in page.slots() {
            let _state = slot.state();
            let _quantile = (slot.reaction.quantile_ns(990_000), slot.wake.mean_ns());
        }
    }
    if let Ok(page) = Page::<ControlSlot>::open(memory_of(bytes)) {
        page.slots()
            .for_each(|slot| assert!(slot.settings().is_none_or(|(_, s)| s.policy as u64 > 0)));
    }
    if let Ok(page) = Page::<TaskSlot>::open(memory_of(bytes)) {
        page.slots().filter_map(TaskSlot::snapshot).for_each(|at| assert_ne!(at.at_ns, Some(0)));
    }
    if let Ok(reader) = ServiceReader::from_memory(memory_of(bytes), &[0; NAME_BYTES]) {
        for lane in 0..reader.lanes() {
            let _answers = (reader.stands_for(lane, 0), reader.writer(lane));
            let _quantile = reader.slot(lane).map(|slot| slot.latency.quantile_ns(500_000));
        }
    }
}

/// A header of one of the four channels, sometimes with one wrong byte.
fn header() -> impl Strategy<Value = Vec<u8>> {
    let channel = prop::sample::select(vec![
        (*b"ELFNLANE", size_of::<LaneSlot>()),
        (*b"ELFNCTRL", size_of::<ControlSlot>()),
        (*b"ELFNTASK", size_of::<TaskSlot>()),
        (*b"ELFNSERV", size_of::<ServiceSlot>()),
    ]);
    let flip = prop::option::weighted(0.3, (0usize..40, any::<u8>()));
    (channel, 1u32..4, flip).prop_map(|((magic, slot), count, flip)| {
        let mut bytes = vec![0; 128];
        bytes[..8].copy_from_slice(&magic);
        put(&mut bytes, 8, 1);
        put(&mut bytes, 12, count);
        put(&mut bytes, 16, 128 + u32::try_from(slot).unwrap() * count);
        put(&mut bytes, 24, u32::try_from(slot).unwrap());
        if let Some((at, value)) = flip {
            bytes[at] = value;
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_page_crashes_a_reader(
        mut bytes in header(),
        pattern in prop::collection::vec(any::<u8>(), 1..64),
        len in 1usize..32_000,
    ) {
        let body = pattern.iter().cycle().copied().take(len);
        bytes.extend(body);
        bytes.truncate(len);
        read_everything(&bytes);
    }

    #[test]
    fn random_bytes_crash_no_reader(bytes in prop::collection::vec(any::<u8>(), 1..512)) {
        read_everything(&bytes);
    }
}

/// Goal: processes that open a service at the same moment all get the same page. Method: rounds of
/// threads that all begin without a page. A thread that wrongly removes the maker's page would show
/// as a page without a name, or as an error.
#[test]
fn simultaneous_openers_share_one_page() {
    const THREADS: usize = 6;
    for round in 0..40 {
        let name = format!("rush-{}-{round}", std::process::id());
        let start = std::sync::Barrier::new(THREADS);
        let open = || {
            start.wait();
            Service::open(&name, 2).map(|service| (service.page().memory().segment_id(), service))
        };
        let opened: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
        });
        assert!(opened.iter().all(|(id, _)| *id == opened[0].0), "round {round}");
        let named = Memory::attach_segment(key_of(&page_name(&name).unwrap()), Access::Read);
        assert_eq!(
            named.unwrap().segment_id(),
            opened[0].0,
            "round {round}: the page has its name"
        );
        opened[0].1.page().memory().remove_name().unwrap();
    }
}

/// Goal: a living maker keeps its page, and the page of a dead maker is replaced. Method: a segment
/// without a header, as a page is before its maker finishes it. Once the maker finishes while
/// another process waits, and once it never does.
#[test]
fn an_unfinished_page_is_waited_for_and_then_replaced() {
    let name = format!("unfinished-{}", std::process::id());
    let key = key_of(&page_name(&name).unwrap());
    let bytes = Page::<ServiceSlot>::bytes(1);
    let made = Memory::create_segment(key, bytes, 0o600).unwrap();
    let id = made.segment_id();
    let opener = std::thread::spawn({
        let name = name.clone();
        move || Service::open(&name, 1).unwrap()
    });
    std::thread::sleep(std::time::Duration::from_millis(20));
    let namespace = elfen_rt::process::pid_namespace();
    let page = Page::<ServiceSlot>::format(made, 1, namespace, &page_name(&name).unwrap()).unwrap();
    let opened = opener.join().unwrap();
    assert_eq!(opened.page().memory().segment_id(), id, "its maker was still working on it");
    page.memory().remove_name().unwrap();
    drop((page, opened));

    let dead = Memory::create_segment(key, bytes, 0o600).unwrap().segment_id();
    let opened = Service::open(&name, 1).unwrap();
    assert_ne!(opened.page().memory().segment_id(), dead, "the dead maker's page is replaced");
    opened.remove().unwrap();
}

/// Goal: a page that another user made is refused. Method: root gives a page to user 65534.
#[test]
#[ignore = "needs root"]
fn another_users_page_is_refused() {
    const OTHER_USER: u32 = 65_534;
    // SAFETY: geteuid takes nothing and cannot fail.
    assert_eq!(unsafe { libc::geteuid() }, 0, "needs root");
    let name = format!("foreign-{}", std::process::id());
    let service = Service::open(&name, 1).unwrap();
    assert!(ServiceReader::open(&name).is_ok());
    service.page().memory().give_to(OTHER_USER, OTHER_USER).unwrap();
    assert_eq!(ServiceReader::open(&name).unwrap_err(), OpenError::Foreign(OTHER_USER));
    assert_eq!(Service::open(&name, 1).unwrap_err(), OpenError::Foreign(OTHER_USER));
    assert!(ServiceReader::open_of(&name, Some(OTHER_USER)).is_ok(), "this user is trusted");
    let gone = Memory::attach_id(i32::MAX, Access::Read).unwrap_err();
    assert_eq!(gone, MemoryError::Absent, "an unused id is absent, and not of another size");
    service.remove().unwrap();
}
