//! Loads Elfen's eBPF objects, and returns their maps and programs as plain descriptors, whose
//! lifetime the kernel manages.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use aya::maps::{Map, MapData, RingBuf};
use aya::programs::perf_event::{
    PerfEventConfig, PerfEventLink, PerfEventScope, SamplePolicy, SoftwareEvent,
};
use aya::programs::uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope};
use aya::programs::{BtfTracePoint, FExit, PerfEvent, Program, UProbe};
use aya::{Btf, Ebpf, EbpfLoader};

use crate::error::Error;

pub(crate) const DUPLICATING: &str = "duplicating a descriptor";

/// An object whose maps are loaded.
#[derive(Debug)]
pub(crate) struct Object {
    ebpf: Ebpf,
    types: Btf,
}

impl Object {
    /// Makes the object's maps. `entries` sets the number of entries of each map by its name.
    pub(crate) fn load(bytes: &[u8], entries: &[(&str, u32)]) -> Result<Self, Error> {
        let types = Btf::from_sys_fs().map_err(|_| Error::NoKernelTypes)?;
        let mut loader = EbpfLoader::new();
        loader.btf(Some(&types));
        for &(map, entries) in entries {
            loader.map_max_entries(map, entries);
        }
        let ebpf = loader.load(bytes).map_err(refused)?;
        Ok(Self { ebpf, types })
    }

    /// Loads a program for a tracepoint, without attaching it.
    pub(crate) fn program(&mut self, name: &str, tracepoint: &str) -> Result<OwnedFd, Error> {
        let program: &mut BtfTracePoint = named(&mut self.ebpf, name)?;
        program.load(tracepoint, &self.types).map_err(refused)?;
        let program = program.fd().map_err(refused)?.as_fd().try_clone_to_owned();
        program.map_err(Error::call(DUPLICATING))
    }

    /// Loads a program for the return of a kernel function, without attaching it.
    pub(crate) fn exit_program(&mut self, name: &str, function: &str) -> Result<OwnedFd, Error> {
        let program: &mut FExit = named(&mut self.ebpf, name)?;
        program.load(function, &self.types).map_err(refused)?;
        let program = program.fd().map_err(refused)?.as_fd().try_clone_to_owned();
        program.map_err(Error::call(DUPLICATING))
    }

    /// Attaches a program to an offset in a file that one process has mapped. The program gets
    /// `cookie` there. It stays attached as long as this object and the process exist.
    pub(crate) fn probe(
        &mut self,
        name: &str,
        (file, offset, cookie): (&Path, u64, u64),
        process: NonZeroU32,
    ) -> Result<(), Error> {
        let program: &mut UProbe = named(&mut self.ebpf, name)?;
        // The program is loaded once for all offsets.
        if program.fd().is_err() {
            program.load().map_err(refused)?;
        }
        let location = UProbeAttachLocation::AbsoluteOffset(offset);
        let point = UProbeAttachPoint { location, cookie: Some(cookie) };
        let attached = program.attach(point, file, UProbeScope::OneProcess(process));
        attached.map(drop).map_err(refused)
    }

    /// Loads a program of software events.
    pub(crate) fn software(&mut self, name: &str) -> Result<OwnedFd, Error> {
        let program: &mut PerfEvent = named(&mut self.ebpf, name)?;
        program.load().map_err(refused)?;
        let program = program.fd().map_err(refused)?.as_fd().try_clone_to_owned();
        program.map_err(Error::call(DUPLICATING))
    }

    /// Attaches a loaded program to these events on each online CPU, as long as the links exist. It
    /// runs after every `every` events.
    pub(crate) fn attach_software(
        &mut self,
        name: &str,
        events: &[SoftwareEvent],
        every: u64,
    ) -> Result<Vec<PerfEventLink>, Error> {
        let program: &mut PerfEvent = named(&mut self.ebpf, name)?;
        let online = aya::util::online_cpus();
        let mut links = Vec::new();
        for cpu in online.map_err(|(_, error)| Error::Cpus(error))? {
            for &event in events {
                let (every, scope) =
                    (SamplePolicy::Period(every), PerfEventScope::AllProcessesOneCpu { cpu });
                let config = PerfEventConfig::Software(event);
                let link = program.attach(config, scope, every, false).map_err(refused)?;
                links.push(program.take_link(link).map_err(refused)?);
            }
        }
        Ok(links)
    }

    /// A ring buffer, which wakes threads that wait for it.
    pub(crate) fn ring(&mut self, name: &str) -> Result<RingBuf<MapData>, Error> {
        let map = self.ebpf.take_map(name);
        let map = map.ok_or_else(|| Error::Refused(format!("the object has no ring {name}")))?;
        RingBuf::try_from(map).map_err(refused)
    }

    pub(crate) fn map(&self, name: &str) -> Result<OwnedFd, Error> {
        let map = self.ebpf.map(name).and_then(data);
        let map = map.ok_or_else(|| Error::Refused(format!("the object has no map {name}")))?;
        map.fd().as_fd().try_clone_to_owned().map_err(Error::call(DUPLICATING))
    }
}

fn named<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut P, Error>
where
    &'a mut P: TryFrom<&'a mut Program>,
{
    let program = ebpf.program_mut(name).and_then(|program| program.try_into().ok());
    program.ok_or_else(|| Error::Refused(format!("the object has no program {name}")))
}

/// The data of a map, for the kinds of maps that Elfen's programs have.
fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(map) | Map::PerfEventArray(map) | Map::LruHashMap(map) => Some(map),
        _ => None,
    }
}

/// Converts an error of aya, which wraps errors in errors. Callers act on whether the kernel
/// returned EPERM.
fn refused(error: impl std::error::Error + 'static) -> Error {
    let mut texts = Vec::new();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        let system = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if matches!(system, Some(libc::EPERM | libc::EACCES)) {
            return Error::NotPermitted;
        }
        texts.push(error.to_string());
        cause = error.source();
    }
    Error::Refused(texts.join(": "))
}
