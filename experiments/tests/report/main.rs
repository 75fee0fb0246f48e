//! Tests of reports as a browser and a spreadsheet read them. The file is parsed, its pictures are
//! measured, and its CSVs are read.

mod drawn;
mod extremes;
mod live;
mod page;
mod shim;
mod simulated;
