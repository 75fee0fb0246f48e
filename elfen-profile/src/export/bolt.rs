//! Taken branches for llvm-bolt.

use std::collections::HashMap;
use std::fmt::Write;

use elfen_instrument::symbols::FunctionTable;
use elfen_stream::counts::EdgeKind;

use crate::profile::{EdgeCount, Place, Profile};

/// The branches of one file that were taken, as llvm-bolt reads them (`fdata`): a line for each
/// pair of places, `1 FROM OFFSET 1 TO OFFSET MISPREDICTED COUNT`. Mispredictions are not known.
pub(crate) fn branches(profile: &Profile, file: u32, table: &FunctionTable) -> String {
    let mut locals: HashMap<&str, u32> = HashMap::new();
    for one in table.functions().iter().filter(|one| one.is_local) {
        *locals.entry(&one.symbol).or_default() += 1;
    }
    let place = |place: Place| {
        let address = table.address_of(place.offset).filter(|_| place.file == file)?;
        let one = table.at(address).filter(|one| !one.symbol.is_empty())?;
        // llvm-bolt numbers local functions with the same symbol. Which is which is not known here.
        let name = match (one.is_local, locals.get(&*one.symbol)) {
            (false, _) => one.symbol.clone(),
            (true, Some(1)) => format!("{}/1", one.symbol),
            (true, _) => return None,
        };
        Some((name, address - one.address))
    };
    let mut text = String::new();
    for (edge, EdgeCount { count, .. }) in &profile.edges {
        let is_taken = match edge.kind {
            EdgeKind::Falls => false,
            // From a call to where it returns to: the return itself is elsewhere.
            EdgeKind::Return | EdgeKind::ReturnFar => false,
            EdgeKind::Jump
            | EdgeKind::Taken
            | EdgeKind::Call
            | EdgeKind::ComputedJump
            | EdgeKind::ComputedCall => true,
        };
        let ends = (place(edge.from), place(edge.to));
        if let (true, (Some((from, at)), Some((to, target)))) = (is_taken, ends) {
            let _written = writeln!(text, "1 {from} {at:x} 1 {to} {target:x} 0 {count}");
        }
    }
    text
}
