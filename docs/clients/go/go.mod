module chairlift.example

go 1.19
