//! Names of the functions of a profile's files.

use std::path::Path;

use elfen_instrument::symbols::{FunctionTable, build_id_of};

use crate::profile::{Place, Profile};

/// The files of a profile, with their symbols.
pub(crate) struct ProfileSymbols {
    tables: Vec<Option<FunctionTable>>,
    names: Vec<String>,
}

/// The name of code that is in no known function.
pub(crate) const NO_SYMBOL: &str = "[no symbol]";

/// A function, or the part of a file of which no function is known.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct FunctionId {
    pub(crate) file: u32,
    /// Address of its start in the file; `None` if it is not known.
    pub(crate) start: Option<u64>,
}

impl ProfileSymbols {
    /// Reads the files. Also returns the paths of files that have changed since.
    pub(crate) fn read(profile: &Profile) -> (Self, Vec<String>) {
        let mut changed = Vec::new();
        let mut tables = Vec::new();
        let mut names = Vec::new();
        for file in &profile.files {
            let path = Path::new(&file.path);
            let table = FunctionTable::read(path);
            let is_other =
                table.as_ref().is_some_and(|found| hexadecimal(&found.build_id) != file.build_id);
            if is_other {
                changed.push(file.path.clone());
            }
            tables.push(table.filter(|_| !is_other));
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            names.push(name.unwrap_or_else(|| file.path.clone()));
        }
        (Self { tables, names }, changed)
    }

    pub(crate) fn function_of(&self, place: Place) -> FunctionId {
        let table = self.table(place.file);
        let found = table.and_then(|table| table.at(table.address_of(place.offset)?));
        FunctionId { file: place.file, start: found.map(|one| one.address) }
    }

    /// The functions of a file; `None` if it cannot be read, or has changed.
    pub(crate) fn table(&self, file: u32) -> Option<&FunctionTable> {
        self.tables.get(usize::try_from(file).ok()?)?.as_ref()
    }

    /// The name of a function.
    pub(crate) fn name(&self, function: &FunctionId) -> String {
        let found = function.start.and_then(|start| self.table(function.file)?.at(start));
        found.map_or_else(|| NO_SYMBOL.to_owned(), |one| one.name.clone())
    }

    /// A place in its function, as in `main+0x12`.
    pub(crate) fn place(&self, place: Place) -> String {
        let id = self.function_of(place);
        let inside = id.start.and_then(|start| {
            let address = self.table(id.file)?.address_of(place.offset)?;
            address.checked_sub(start)
        });
        let name = self.name(&id);
        match inside.unwrap_or(place.offset) {
            0 => name,
            inside => format!("{name}+{inside:#x}"),
        }
    }

    /// The name of what begins at the start of a function, which may be inside another one.
    pub(crate) fn start_of(&self, function: &FunctionId) -> String {
        let start = function.start.unwrap_or(0);
        let offset = self.table(function.file).and_then(|table| table.offset_of(start));
        match offset.filter(|_| function.start.is_some()) {
            Some(offset) => self.place(Place { file: function.file, offset }),
            None => self.name(function),
        }
    }

    /// Whether a file has a function with this name.
    pub(crate) fn has_function(&self, name: &str) -> bool {
        self.tables.iter().flatten().any(|one| one.functions().iter().any(|one| one.name == name))
    }

    /// The name of a file, without its folder.
    pub(crate) fn file_name(&self, file: u32) -> &str {
        usize::try_from(file).ok().and_then(|file| self.names.get(file)).map_or("?", String::as_str)
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Notes the build ids of a profile's files, right after it was recorded.
pub(crate) fn note_build_ids(profile: &mut Profile) {
    for file in &mut profile.files {
        let found = build_id_of(Path::new(&file.path));
        file.build_id = found.map(|id| hexadecimal(&id)).unwrap_or_default();
    }
}
