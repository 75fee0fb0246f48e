//! The settings file read anew, at SIGHUP.
//!
//! All that can fail is done before anything is changed: a file that is wrong, or lanes that cannot
//! be opened, leave everything as it was. Then the fences stand still until other guards stand.

use std::sync::Arc;

use elfen_console::failure::{Failure, Status as Exit};

use super::log::{Level, say};
use super::settings::Settings;
use super::units::Units;
use super::{Daemon, lent_lanes, release, require};
use crate::fence::status::Frozen;
use crate::run::placement;

impl Daemon {
    pub(super) fn reload(&mut self) {
        match self.read_anew() {
            Ok(()) => say(Level::Notice, "the settings were read anew"),
            Err(why) => say(Level::Error, format_args!("the settings stay as they were: {why}")),
        }
    }

    fn read_anew(&mut self) -> Result<(), Failure> {
        let settings = Settings::open(&self.file)
            .map_err(|error| Failure::new(Exit::Usage, "reading them", error, "correct it"))?;
        require(&settings)?;
        let nap = Arc::new(settings.open_nap()?);
        let opened = lent_lanes::open_all(&settings, &nap)?;
        let serving = self.serving.rebind(settings.metrics)?;
        self.freeze_all(&Frozen::Unguarded);
        self.guarding.end();
        // Where a cpuset of ours says otherwise, the daemon stays where it is.
        let _left = placement::avoid_lanes_within(&self.began_on, &settings.requests());
        (self.settings, self.nap, self.opened) = (settings, nap, opened);
        self.units = Units::default();
        if let Some(serving) = serving {
            self.serving = serving;
        }
        self.warn_of_lanes();
        self.keep_what_is_named();
        self.look();
        Ok(())
    }

    /// A fence that the file does not name any more is an ordinary cgroup again, as by `--release`.
    fn keep_what_is_named(&mut self) {
        let (folder, fences) = (&self.folder, &self.settings.fences);
        self.held.retain_mut(|held| {
            let named = fences.iter().find(|fence| fence.which == held.which);
            let done = match named {
                Some(fence) => held.follow(fence, folder),
                None => release::open(&held.noted(), &held.group, folder),
            };
            match done {
                Ok(()) if named.is_none() => {
                    let (name, path) = (&held.name, &held.group.path);
                    let line = format_args!("fence {name:?}: {path} is an ordinary cgroup again");
                    say(Level::Notice, line);
                }
                Ok(()) => {}
                Err(error) => say(Level::Error, format_args!("fence {:?}: {error}", held.name)),
            }
            named.is_some()
        });
    }
}
