//! Opens `/dev/nanonap`, and explains to the operator why that fails.
//!
//! Naps themselves go through `elfen_rt::nap::device`, in the process that naps. This module opens
//! the same device. If that fails, it looks for the reason in `/proc` and `/sys`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use elfen_rt::memory::MemoryError;
use elfen_rt::nanonap::{DeviceError, WaitKind};
use elfen_rt::nap::device::Device;
use elfen_rt::signal::task::TaskMap;

const NODE: &str = "/dev/nanonap";
const MODULES: &str = "/proc/modules";
const MODULE: &str = "/sys/module/nanonap";

/// Why naps in the kernel are not available.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Missing {
    #[error("this kernel loads no modules")]
    NoModules,
    #[error("the nanonap module is not loaded")]
    NotLoaded,
    /// The module is loaded, but its device is not in this /dev. A container has a /dev of its own.
    #[error("the nanonap module is loaded, but there is no {NODE} here")]
    NoNode,
    #[error("only members of group {group} may open {NODE}")]
    NotInGroup { group: u32 },
    /// The module has another version, the file is another device, or its map cannot be mapped.
    #[error("{0}")]
    Unusable(DeviceError),
    #[error("the nanonap module is loaded, but finds no MONITOR/MWAIT that works on this CPU")]
    CannotWait,
    #[error("the nanonap module is loaded, but finds no SMT siblings on this machine")]
    NoTies,
}

impl Missing {
    /// What the operator can do about it.
    pub fn fix(&self) -> String {
        match self {
            Self::NoModules => "boot a kernel built with CONFIG_MODULES".to_owned(),
            Self::NotLoaded => {
                "build it in kernel/nanonap and load it (as root: `modprobe nanonap`)".to_owned()
            }
            Self::NoNode => format!("make {NODE} available in this container"),
            Self::NotInGroup { group: 0 } => {
                "give the device a group: kernel/nanonap/nanonap.rules does".to_owned()
            }
            Self::NotInGroup { group } => format!("add this user to group {group}"),
            Self::Unusable(_) => "load the nanonap module of this version".to_owned(),
            Self::CannotWait => "use a CPU that shows MONITOR/MWAIT".to_owned(),
            Self::NoTies => {
                "name the pairs when loading the module (`modprobe nanonap pairs=0:1`)".to_owned()
            }
        }
    }
}

/// Opens the device for naps. Fails unless it can wait and at least one lane can wake another.
pub fn open() -> Result<Device, Missing> {
    let device = Device::open().map_err(why_not)?;
    if device.module().wait_kind() == WaitKind::None {
        return Err(Missing::CannotWait);
    }
    if device.module().ties() == 0 {
        return Err(Missing::NoTies);
    }
    Ok(device)
}

/// Opens the module's task map.
pub fn open_map() -> Result<TaskMap, Missing> {
    TaskMap::open_module().map_err(why_not)
}

fn why_not(error: DeviceError) -> Missing {
    let group = fs::metadata(NODE).ok().map(|node| node.gid());
    let machine = Machine { group, modules: exists(MODULES), module: exists(MODULE) };
    machine.explain(error)
}

fn exists(path: &str) -> bool {
    Path::new(path).exists()
}

/// What the machine shows of the module when the device cannot be opened.
#[derive(Debug)]
struct Machine {
    /// The device's group, if the device exists.
    group: Option<u32>,
    /// Whether the kernel supports modules.
    modules: bool,
    /// Whether the nanonap module is loaded.
    module: bool,
}

impl Machine {
    fn explain(&self, error: DeviceError) -> Missing {
        match (error, self.group) {
            (DeviceError::Open(MemoryError::Denied), Some(group)) => Missing::NotInGroup { group },
            (DeviceError::Open(MemoryError::Absent), _) if self.module => Missing::NoNode,
            (DeviceError::Open(MemoryError::Absent), _) if self.modules => Missing::NotLoaded,
            (DeviceError::Open(MemoryError::Absent), _) => Missing::NoModules,
            (error, _) => Missing::Unusable(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each state of a machine has its own reason. Method: all states.
    #[test]
    fn each_state_of_a_machine_has_its_own_reason() {
        let (absent, denied) = (MemoryError::Absent, MemoryError::Denied);
        let explain = |group, modules, module, error| {
            Machine { group, modules, module }.explain(DeviceError::Open(error))
        };
        assert_eq!(explain(None, false, false, absent), Missing::NoModules);
        assert_eq!(explain(None, true, false, absent), Missing::NotLoaded);
        assert_eq!(explain(None, true, true, absent), Missing::NoNode);
        assert_eq!(explain(Some(7), true, true, denied), Missing::NotInGroup { group: 7 });
        let broken = explain(Some(7), true, true, MemoryError::Other(libc::EIO));
        assert_eq!(broken, Missing::Unusable(DeviceError::Open(MemoryError::Other(libc::EIO))));
    }

    /// Goal: on this machine the device either works, or the reason comes with a fix. Method: open
    /// the device.
    #[test]
    fn the_device_works_or_has_a_fix() {
        match open() {
            Ok(device) => assert!(device.module().ties() > 0 && device.slot(0).is_some()),
            Err(missing) => assert!(!missing.fix().is_empty(), "{missing}"),
        }
    }
}
