//! Reads the settings file again, at SIGHUP.
//!
//! All that can fail comes before any change: an invalid file, or lanes that cannot be opened,
//! leave everything as it was. Then the fences stay frozen until new guards run.

use std::sync::Arc;

use elfen_console::failure::{Failure, Status as Exit};

use super::log::{Level, report};
use super::settings::Settings;
use super::units::Units;
use super::{Daemon, lent_lanes, release, require};
use elfen_machine::fence::status::Frozen;
use elfen_machine::placement;

impl Daemon {
    pub(super) fn reload(&mut self) {
        match self.read_settings_again() {
            Ok(()) => report(Level::Notice, "the settings were read again"),
            Err(why) => report(Level::Error, format_args!("the settings are unchanged: {why}")),
        }
    }

    fn read_settings_again(&mut self) -> Result<(), Failure> {
        let settings = Settings::open(&self.file)
            .map_err(|error| Failure::new(Exit::Usage, "reading them", error, "correct it"))?;
        require(&settings)?;
        let nap = Arc::new(settings.open_nap()?);
        let opened = lent_lanes::open_all(&settings, &nap)?;
        let metrics = self.metrics.rebind(settings.metrics)?;
        self.freeze_all(&Frozen::Unguarded);
        self.guards.stop();
        // If a cpuset forbids this, the daemon stays where it is.
        let _left = placement::avoid_lanes_within(&self.initial_cpus, &settings.requests());
        self.settings = settings;
        self.nap = nap;
        self.lent_lanes = opened;
        self.units = Units::default();
        if let Some(metrics) = metrics {
            self.metrics = metrics;
        }
        self.warn_of_offline_lanes();
        self.release_unlisted_fences();
        self.check_all();
        Ok(())
    }

    /// Turns fences that the file no longer lists into ordinary cgroups, as `--release` does.
    fn release_unlisted_fences(&mut self) {
        let folder = &self.folder;
        let fences = &self.settings.fences;
        self.fences.retain_mut(|fence| {
            let listed = fences.iter().find(|listed| listed.which == fence.which);
            let done = match listed {
                Some(listed) => fence.apply_settings(listed, folder),
                None => release::open(&fence.to_record(), &fence.group, folder),
            };
            match done {
                Ok(()) if listed.is_none() => {
                    let name = &fence.name;
                    let path = &fence.group.path;
                    let line = format_args!("fence {name:?}: {path} is an ordinary cgroup again");
                    report(Level::Notice, line);
                }
                Ok(()) => {}
                Err(error) => report(Level::Error, format_args!("fence {:?}: {error}", fence.name)),
            }
            listed.is_some()
        });
    }
}
